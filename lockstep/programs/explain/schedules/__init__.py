"""Schedules that are explained and measured; a run uses those of `lockstep.wire.schedules` only."""
