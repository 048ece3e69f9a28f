"""The experiments behind ``docs/results.md``: what is measured, how, where it is kept, and the pages made from it.

    python -m benchmarks.experiments --preset headline   the headline table, within minutes, compared with what is kept
    python -m benchmarks.experiments --jobs 2            all of it, into benchmarks/results
    python -m benchmarks.experiments --list              what is there, and what is missing
    python -m benchmarks.experiments.page                docs/results.md, and the numbers in other documents
    python -m benchmarks.experiments.page --check        whether they are up to date

============  ========================================================================================================
``plan``      the list of experiments, their sizes, and where their factors come from: shipped, found, or derived
``bench``     what is there, what is missing, and getting it
``measure``   carries one experiment out, in a process of its own
``store``     results as tables: JSON Lines files, one row a measurement
``figures``   what the pages say, computed from the results alone; ``pictures``: the same, drawn
``page``      fills the templates
============  ========================================================================================================
"""
