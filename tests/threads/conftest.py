"""The second tier: real Lance and torch, and no Ray."""

from tests.helpers.brain_floats import bfloat16_uri as bfloat16_uri
from tests.helpers.filmed import made as made
from tests.helpers.namespace_tables import root as root
from tests.helpers.spans import exported as exported
from tests.helpers.spans import provider as provider
from tests.helpers.token_costs import tokens as tokens
