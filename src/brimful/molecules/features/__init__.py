"""Molecules to numbers: one small protocol, seven ways, and a cache on disk in front of all of them.

    ecfp          Morgan bits of RDKit, 2,048 of them, uint8: the default, with no weights to trust
    descriptors   RDKit's 2D descriptors, those that are defined for every molecule
    chemnet       512 learned features, the weights in the wheel of `fcd_torch`
    minimol       512 learned features, in a Python of its own: its pins do not bind ours
    unimol        512 learned features of a 3D conformer, weights from the user, in a Python of its own as well
    FILE          a ready `.npy` or `.parquet`, one row for each row of the molecules' file
    FILE.py:NAME  a function of the user's: a list of SMILES in, an array out

Weights load strictly: a tensor that is missing, left over or of another shape is an error, never random. A molecule that
an encoder cannot take is listed in `Features.failed` with its reason; its row is NaN, so that nothing can use it unseen.
"""

from brimful.molecules.features.compute import ENCODERS as ENCODERS
from brimful.molecules.features.compute import features_of as features_of
from brimful.molecules.features.compute import load_encoder as load_encoder
from brimful.molecules.features.encoder import Encoded as Encoded
from brimful.molecules.features.encoder import Encoder as Encoder
from brimful.molecules.features.encoder import Features as Features
