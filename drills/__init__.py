"""The drill daemon of a GPU node: schedule, guard, inject, judge, undo, report."""
