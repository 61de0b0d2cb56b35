"""Changes of text, such as the bugs that are planted in scripts."""


def changed(text, changes, where):
    """The text with the changes, pairs of texts (old, new).

    Raises ValueError if what a change replaces does not occur exactly once; `where` is named then.
    """
    for old, new in changes:
        count = text.count(old)
        if count != 1:
            raise ValueError(f"{where}: {count} places, in place of one, with {old!r}")
        text = text.replace(old, new)
    return text
