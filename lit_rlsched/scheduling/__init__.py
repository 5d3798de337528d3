"""Decides what decodes when and when a round ends; knows neither torch nor Lightning.

In a round: a rule (`round_rule.py` is the interface) plans which groups decode. The admission of
an engine gives free slots to requests, in an order that predicted lengths may decide. After each
step the rule says whether the round is over, and at its end splits the groups into those to train
on and those that stay. What ran when is in the trace (`trace.py`); when trainer and engines worked
is in the timeline.

Imports `types`, `settings`.
"""
