"""The making of a filtered, shuffled or grouped copy of a Lance dataset."""
