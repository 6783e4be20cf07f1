"""EAGLE-3 speculative decoding, one module per stage: is a low acceptance the drafter's fault or the engine's?

The notebooks call the stage modules (preflight, profile, generate, extract, train, audit, benchmark, replay, diagnose,
publish). Shared by all: params, provenance, targets, drafter, checkpoint, features, acceptance, plots, engines.
"""

import warnings

# tqdm falls back to text bars, which is what a saved notebook can show.
warnings.filterwarnings("ignore", message="IProgress not found")
