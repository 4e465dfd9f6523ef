"""Flash attention for Hopper (sm_90) in Gluon: TMA loads, one producer and two or three wgmma consumer warp groups."""
