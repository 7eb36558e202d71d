"""Kernels of notebooks under test find this checkout, wherever pytest was started."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
paths = [ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
os.environ.setdefault("OMP_NUM_THREADS", "1")
