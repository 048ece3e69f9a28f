"""The experiments behind ``docs/results.md``: what is measured, how, where it is kept, and the page made from it.

    python -m benchmarks.experiments --preset headline   the headline table, within minutes, compared with what is kept
    python -m benchmarks.experiments --jobs 2            all of it, into benchmarks/results/reference
    python -m benchmarks.experiments --list              what is there, what is missing, and how long it would take
    python -m benchmarks.experiments.page                docs/results.md from the results that are kept

==============  ======================================================================================================
``plan``        the list of experiments, each one with the command of the product that it equals, and their sizes
``sources``     where an experiment's factors come from: shipped, found by a search, or derived from those
``bench``       what is there, what is missing, and getting it
``measure``     carries one experiment out
``store``       results as JSON files, one an experiment
``page``        the tables; computes from the results alone
==============  ======================================================================================================
"""
