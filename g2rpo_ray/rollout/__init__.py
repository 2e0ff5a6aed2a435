"""Rollout: anchors, singular-SDE branches and multi-granularity completions, on Ray actors."""
