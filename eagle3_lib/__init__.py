"""EAGLE-3 speculative decoding: is a low acceptance the drafter's fault or the engine's?

Rooms, in the order in which they may import each other (tests/unit/test_layers.py): targets, drafter, verdict, engines,
compat and reports, features, training, stages. Notebooks import stages, reports and params only. In this folder itself
lies what every room uses: params, errors, paths, files, manifest, journal, process.
"""

import warnings

# tqdm falls back to text bars, which is what a saved notebook can show.
warnings.filterwarnings("ignore", message="IProgress not found")
