"""Where living members of a run can be found."""
