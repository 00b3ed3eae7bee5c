"""The whole engine in virtual time: real cores, shells and links, a simulated device, faults, monitors."""
