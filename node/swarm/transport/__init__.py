"""Calls between peers over libp2p, directly or through relays."""
