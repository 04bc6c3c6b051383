"""The integer linear program: what it is (`problem`) and how it is solved (`solve`)."""
