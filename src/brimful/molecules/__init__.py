"""`brimful sweep`: many small heads on frozen molecular features, trained together.

A GPU that one small run cannot fill is filled with more runs, not with a larger batch, which would change what is
trained. From the spec to the report:

    spec.py, spec_file.py   the grid of runs from SPEC.toml, checked before anything runs
    dataset.py              rows of a file → molecules that RDKit can read, the others listed
    splits.py, published.py in- and out-of-distribution molecules for training, validation and testing
    features/, prepare.py   encoder → cached matrix → standardised rows
    heads.py                one run: head, random numbers, loss
    feature_store.py, pack.py, runner.py, workers.py   rows on the device → packs of runs → processes
    methods.py, metrics.py  weights or features → one score per test molecule → AUROC, AUPR, FPR95
    sweep.py, folder.py     all of it in order, resumable
    results.py, page.py, terminal.py                   rows → tables and report.html

To add a baseline: one function and one entry in `methods.py`. To add an encoder: one class and one entry in
`features/encoder.py`. Only the command line imports this package.
"""
