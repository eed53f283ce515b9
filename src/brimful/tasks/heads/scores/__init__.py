"""One number a molecule, higher for what looks out of distribution, from distances or from a trained classifier.

    distance     what is known is the ID training features: mahalanobis, knn, lof
    classifier   what is known is a head trained on ID labels: msp, odin, energy, mc-dropout

Nothing here sees a test label or an OOD molecule of the test set: what is fitted, is fitted on ID training molecules. The
options of all scores are checked in `options`, which imports nothing heavy, so that a spec can be refused before it runs.
"""

from brimful.tasks.heads.scores.classifier import classifier_scores
from brimful.tasks.heads.scores.distance import distance_scores
from brimful.tasks.heads.scores.options import option_problems

__all__ = ["classifier_scores", "distance_scores", "option_problems"]
