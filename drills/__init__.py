"""The fire drills of a GPU node. They arrive with `tocsin drilld`; the package is reserved here."""
