"""Training: the exact step, alone or over several processes, the loop around it, and what supervises it.

`brimful.train` is this package, and also the function that trains: `brimful.train(task, data, …)`, see `api`.
"""

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    """A package that can be called. It and the public function have one name."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        from brimful.train.api import train

        return train(*args, **keywords)


sys.modules[__name__].__class__ = _Train
