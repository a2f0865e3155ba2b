"""The runtime whose helpers are Ray actors, and raylance's use of Ray outside Ray Train."""
