"""Tests with other people's programs: `make test-integrations` installs them, and they are skipped elsewhere."""
