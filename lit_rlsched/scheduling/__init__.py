"""Decides what decodes when and when a round ends; knows neither torch nor Lightning.

Imports `types`, `settings`.
"""
