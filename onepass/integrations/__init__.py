"""Tuners at home in other people's training loops: one thin file a framework, none imported by ``onepass`` itself."""
