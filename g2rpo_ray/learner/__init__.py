"""Learner: DeepSpeed ranks on Ray actors that turn integrated advantages into updates."""
