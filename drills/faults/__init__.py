"""The faults, one small file each: plan, inject, prove, undo, and what is left."""
