"""`gnomon bench`: how fast operators, steps, a server and a start-up are on this machine."""
