"""Prompts: data sets, tasks, tokenisation and the order in which prompts are drawn."""
