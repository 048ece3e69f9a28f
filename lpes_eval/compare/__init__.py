"""Runs of lm-eval held against each other: results, statistics, paired differences, and the gate."""
