"""Owns reading from Lance: versions, selections and rows; never decides which rank gets which rows."""
