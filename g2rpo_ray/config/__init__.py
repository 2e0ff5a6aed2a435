"""Every setting of a run, its unit and its default, once; a file for each part of the system.

A configuration is a YAML file plus dotted overrides (``learner.learning_rate=1e-4``). Unknown keys,
wrong types and impossible combinations are a :class:`ConfigError` that names file, key, value and
what is allowed; nothing is corrected silently.
"""

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config.algorithm import (
    DanceGrpoSection,
    FlowGrpoSection,
    G2rpoSection,
    MixGrpoSection,
    SamplingSection,
)
from g2rpo_ray.config.cluster import ClusterSection
from g2rpo_ray.config.files import config_from_dict, load_config, save_config
from g2rpo_ray.config.learner import AdvantageSection, LearnerSection, WeightSyncSection
from g2rpo_ray.config.model import LoraSection, ModelSection, PromptsSection
from g2rpo_ray.config.operation import CheckpointSection, EvaluationSection, TrackingSection
from g2rpo_ray.config.rollout import RolloutSection
from g2rpo_ray.config.run import Config

__all__ = [
    "AdvantageSection",
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "ConfigError",
    "DanceGrpoSection",
    "EvaluationSection",
    "FlowGrpoSection",
    "G2rpoSection",
    "LearnerSection",
    "LoraSection",
    "MixGrpoSection",
    "ModelSection",
    "PromptsSection",
    "RolloutSection",
    "SamplingSection",
    "TrackingSection",
    "WeightSyncSection",
    "config_from_dict",
    "load_config",
    "save_config",
]
