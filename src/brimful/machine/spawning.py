"""Whether processes may be started behind the user's back.

A spawned process imports the program's main file once more. The `brimful` command and anything run with `python -m` are
made for that; a plain script without an `if __name__ == "__main__"` would run again from the top, and Python ends it with
a traceback. So what would only be faster with processes does without them there.
"""

import sys
from pathlib import Path


def may_spawn() -> bool:
    main = sys.modules.get("__main__")
    return getattr(main, "__spec__", None) is not None or Path(getattr(main, "__file__", None) or "").stem == "brimful"
