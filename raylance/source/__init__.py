"""Reading from Lance: versions, selections and rows."""
