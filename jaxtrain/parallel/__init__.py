"""How a model lies over devices: mesh, sharding rules, collectives, sharded parameters, the loop over layers."""
