"""The third tier: what Ray alone can show."""

from tests.helpers.filmed import made as made
