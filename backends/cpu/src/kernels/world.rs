//! This rank among the domains of the world, and the shapes that it works with.

use tokenyard_core::domains::Domains;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::Shape;

/// Where this rank is, and the shapes that it works with. They never change.
#[derive(Clone, Copy, Debug)]
pub(super) struct World {
    pub(super) rank: u32,
    pub(super) shape: Shape,
    pub(super) domains: Domains,
    /// The shape of this rank's domain: its ranks, and their experts.
    pub(super) inside: Shape,
}

impl World {
    pub(super) fn new(shape: &KernelShape) -> Self {
        let (moe, domains) = (Shape::from(shape), Domains::new(shape));
        Self { rank: shape.rank, shape: moe, domains, inside: domains.inside(&moe) }
    }
}
