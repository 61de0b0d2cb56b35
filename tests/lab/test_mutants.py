"""lab.mutants: lines that are deleted or negated one at a time."""

from lab.mutants import files_that_test, mutants_of

TEXT = '''
LIMIT = 3

def f(rows: list):
    """A docstring."""
    total: int
    if "é" in rows and rows:
        raise ValueError(
            f"{rows}"
        )
    return [row for row in rows if row > LIMIT]
'''


def test_each_statement_is_deleted_and_each_condition_negated():
    found = {(m.line, m.kind, m.code): m.text for m in mutants_of("f.py", TEXT)}
    condition, error = '"é" in rows and rows', 'raise ValueError( f"{rows}" )'
    assert list(found) == [
        (7, "negated", condition),
        (8, "deleted", error),
        (11, "deleted", "return [row for row in rows if row > LIMIT]"),
        (11, "negated", "row > LIMIT"),
    ]
    assert f"    if (not ({condition})):\n" in found[7, "negated", condition]
    assert "rows:\n        pass\n    return" in found[8, "deleted", error]
    assert "if (not (row > LIMIT))]" in found[11, "negated", "row > LIMIT"]


def test_tests_with_the_name_of_the_module_run_first():
    assert files_that_test("utils/checkpoint.py")[0] == "tests/utils/test_checkpoint.py"
    assert files_that_test("utils/guards/lock.py")[0] == "tests/utils/test_guards.py"
    assert files_that_test("utils/guards/replicas.py")[0] == "tests/utils/test_replicas.py"
    assert files_that_test("tasks/images/__init__.py")[0] == "tests/tasks/test_images_task.py"
