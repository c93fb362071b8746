//! One direct exchange: over the only level; or, with several domains, inside this one or on the rail.

use tokenyard_core::domains::{Domains, Member};
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::Shape;

/// This rank in an exchange, and the shapes that it works with. They never change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange {
    pub(crate) member: Member,
    /// The shape of the team: its ranks, and their experts.
    pub(crate) shape: Shape,
    /// The shape that outputs are laid out for. Its ranks are the sources: one for each place.
    pub(crate) regions: Shape,
}

impl Exchange {
    fn new(member: Member, world: &Shape) -> Self {
        Self { member, shape: member.shape(world), regions: member.regions(world) }
    }

    /// The exchange with owners, and the exchange on the rail if there are several domains. `level`: the level of
    /// the first.
    pub(crate) fn of(shape: &KernelShape, level: u64) -> (Self, Option<Self>) {
        let (world, domains) = (Shape::from(shape), Domains::new(shape));
        if domains.count == 1 {
            return (Self::new(Member::whole(shape.rank, shape.ranks, level), &world), None);
        }
        let [owners, rail] = Member::levels(domains, level);
        (Self::new(owners, &world), Some(Self::new(rail, &world)))
    }
}
