"""Scripts with and without bugs, by which tools.check is measured."""
