"""Between hosts: messages by torch's process groups, sums by schedules, on one level or two."""
