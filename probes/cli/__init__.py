"""The ``keel`` command. Each command imports what it needs inside its body, so that ``keel --help`` stays fast."""
