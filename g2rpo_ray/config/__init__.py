"""Every setting of a run, its unit and its default, once; a file for each part of the system.

A configuration is a YAML file plus dotted overrides (``learner.learning_rate=1e-4``). Unknown keys,
wrong types and impossible combinations are a ``ConfigError`` that names file, key, value and
what is allowed; nothing is corrected silently.
"""

from g2rpo_ray.config.files import config_from_dict, load_config, save_config
from g2rpo_ray.config.model import LoraSection, ModelSection
from g2rpo_ray.config.run import Config

__all__ = [
    "Config", "LoraSection", "ModelSection", "config_from_dict", "load_config", "save_config",
]  # fmt: skip
