"""`check diff`: where do two training runs part first? See docs/diff.md.

`command` runs both under observation, `runs` reads what they had in each step, `stages` compares
that in the order of causes, `factors` says how two tensors differ, and `report` prints it.
"""
