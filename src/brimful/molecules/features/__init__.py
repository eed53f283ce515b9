"""Molecules to numbers: one small protocol, seven encoders, and a cache on disk in front of all of them.

    ecfp          Morgan bits of RDKit, 2,048 of them, uint8: the default, without weights
    descriptors   RDKit's 2D descriptors that are defined for every molecule
    chemnet       512 learned features, weights from the wheel of `fcd_torch`
    minimol       512 learned features, in a separate Python, so that its pins do not bind ours
    unimol        512 learned features of a 3D conformer, weights from the user, in a separate Python as well
    FILE          a `.npy` or `.parquet`, one row for each row of the molecules' file
    FILE.py:NAME  a function of the user's: a list of SMILES in, an array out

`encoder.py` has the protocol and loads an encoder from the spec, `in_process.py` and `external.py` have the encoders,
`compute.py` the cache. Weights load strictly: a tensor that is missing, left over or of another shape is an error. A
molecule that an encoder cannot take is listed in `Features.failed` with a reason; its row is NaN.
"""
