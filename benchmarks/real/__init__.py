"""Layer factors on real pretrained models: where a model loses its context, what factors change, what they cost.

``python -m benchmarks.real --help`` lists the commands. Every measurement is one line of JSON for each question, so a
run that was stopped goes on where it was.
"""

POSITIONS = (0.0, 25.0, 50.0, 75.0, 100.0)
"""Of the gold item, in percent."""
