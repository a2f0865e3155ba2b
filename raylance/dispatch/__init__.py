"""The decisions: which helper does an item, which work is repeated, which item must wait."""
