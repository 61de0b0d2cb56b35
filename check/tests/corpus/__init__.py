"""Scripts with and without bugs, by which the check is measured."""
