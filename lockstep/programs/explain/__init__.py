"""How a collective works, round by round: on the terminal, as JSON and as a picture."""
