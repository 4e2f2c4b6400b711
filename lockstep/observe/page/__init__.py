"""The page of a run: what its folder says, as a view, and how the view is shown: in a browser, in a file."""
