"""EAGLE-3 speculative decoding, one module per stage: is a low acceptance the drafter's fault or the engine's?

The notebooks call the stage modules (preflight, profile, generate, extract, train, audit, benchmark, replay, diagnose,
publish). Shared by all: params, provenance, targets, drafter, checkpoint, features, acceptance, plots, engines.
"""
