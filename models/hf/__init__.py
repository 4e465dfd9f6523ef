"""Hugging Face architectures: mapping of weight names and layouts, and of config.json fields.

What it exports is what a `weight_map` of a user's own is made of.
"""

from .architecture import Architecture as Architecture
from .config_fields import ActivationField as ActivationField
from .config_fields import FieldError as FieldError
from .config_fields import FieldMapping as FieldMapping
from .config_fields import FixedKeys as FixedKeys
from .config_fields import HFConfig as HFConfig
from .config_fields import KeyField as KeyField
from .config_fields import RequiredValue as RequiredValue
from .config_fields import TiedHeadField as TiedHeadField
from .config_fields import position_field as position_field
from .weight_layout import ConcatenatedRows as ConcatenatedRows
from .weight_layout import Identity as Identity
from .weight_layout import PaddedVocabulary as PaddedVocabulary
from .weight_layout import PerExpert as PerExpert
from .weight_layout import QKVInterleavedByHead as QKVInterleavedByHead
from .weight_layout import Transposed as Transposed
from .weight_map import WeightMap as WeightMap
from .weight_map import WeightRule as WeightRule
from .weight_map import weight_and_bias_rules as weight_and_bias_rules
