//! Rails: the NICs of each GPU, and GPUs whose NIC is missing or cannot be used.

mod idle;

pub use idle::IdleNic;

use std::fmt::{self, Display, Formatter};

use tokenyard_errors::words::first_names;

use idle::IdleRails;

use crate::{Distance, Gpu, Machine, Nic, NicFamily, PciAddress, PciFunction};

/// The rail NICs that are nearest to a GPU.
#[derive(Clone, Debug)]
pub struct RailShare<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// The distance of its NICs.
    pub distance: Distance,
    /// The NICs, all equally near.
    pub nics: Vec<&'a Nic>,
    /// The number of its own NICs, in thousandths. A NIC that is as near to other GPUs counts as a fraction.
    /// 0 if its NICs are farther than those of other GPUs.
    pub own: u64,
}

/// A GPU that has no NIC of its own, or fewer than others have, or no usable one. Its text names
/// the GPU, the missing NIC as exactly as the node allows, and the NICs that are there.
#[derive(Clone, Debug)]
pub struct MissingRail<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// The kind of lack.
    pub lack: Lack,
    /// Cards of the rails' model without an RDMA device that may be the missing NIC: those near the
    /// GPU, where other GPUs have their NIC near.
    pub cards: Vec<PciAddress>,
    /// The module that makes cards of the rails' family RDMA devices; nothing where it is not known.
    pub module: Option<&'static str>,
    /// Names of the rail NICs that are there; where this GPU's NIC cannot be used, of those that
    /// ranks would use.
    pub there: Vec<&'a str>,
}

/// The lack of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lack {
    /// Most GPUs have a NIC next to them, and this one has none.
    NoNic {
        /// The number of GPUs that have one.
        with: usize,
        /// The number of all GPUs.
        gpus: usize,
        /// The bridge above both GPU and NIC on other GPUs, in a word (`switch`, `root port`), and
        /// its address here.
        place: Option<(&'static str, PciAddress)>,
        /// Ports below it without a link; the missing card may belong at one of them.
        ports: Vec<PciAddress>,
    },
    /// NICs do not divide evenly among GPUs, and this one has less than most.
    Uneven {
        /// Its NICs and the GPUs that share them; nothing where the NICs are farther than those of
        /// others.
        has: Option<(usize, usize)>,
        /// Names of these NICs.
        near: Vec<String>,
        /// The number of own NICs of most other GPUs, in thousandths.
        usual: u64,
        /// The number of GPUs.
        gpus: usize,
    },
    /// Most GPUs have a usable NIC next to them, and this GPU has none, or too few for one of its
    /// own. Or no GPU has a usable NIC, and NICs for other purposes are usable.
    Idle {
        /// The number of GPUs with a usable NIC.
        with: usize,
        /// The number of all GPUs.
        gpus: usize,
        /// Its NICs that cannot be used.
        nics: Vec<IdleNic>,
        /// Names of the usable NICs next to it, which it shares.
        left: Vec<String>,
    },
}

/// One NIC for one GPU, in thousandths. It is slightly less than 1000, because a third of three
/// NICs counts 999.
pub const ONE_NIC: u64 = 995;

/// Class of network controllers.
const NETWORK: u32 = 0x02;

impl Machine {
    /// The GPUs that this process may use; all GPUs of the node, where it may use none.
    pub fn given_gpus(&self) -> Vec<&Gpu> {
        let some_are = self.gpus.iter().any(|gpu| gpu.is_visible);
        self.gpus.iter().filter(|gpu| gpu.is_visible || !some_are).collect()
    }

    /// The nearest rail NICs of each GPU that this process may use, whether their links are up or
    /// not.
    pub fn rail_shares(&self) -> Vec<RailShare<'_>> {
        let rails = self.rail_nics();
        let mut all: Vec<_> = self
            .given_gpus()
            .into_iter()
            .filter_map(|gpu| self.nearest_rails(gpu, &rails))
            .collect();
        let owns: Vec<u64> = all
            .iter()
            .map(|one| match is_as_near(&all, one) {
                true => share(&all, &one.nics),
                false => 0,
            })
            .collect();
        all.iter_mut().zip(owns).for_each(|(one, own)| one.own = own);
        all
    }

    fn nearest_rails<'a>(&self, gpu: &'a Gpu, rails: &[&'a Nic]) -> Option<RailShare<'a>> {
        let far = |nic: &Nic| nic.pci.get().map(|at| self.distance(gpu.pci, at));
        let distance = rails.iter().filter_map(|nic| far(nic)).min()?;
        let nics = rails.iter().copied().filter(|nic| far(nic) == Some(distance)).collect();
        Some(RailShare { gpu, distance, nics, own: 0 })
    }

    /// GPUs that this process may use and whose NIC is missing. They have no NIC next to them, and most GPUs
    /// have one; or there are too few NICs to divide evenly among the GPUs, and they have a smaller share
    /// than others. Nodes on which half of the GPUs or more have no NIC, or several GPUs share one, are
    /// regular designs. So are nodes with one NIC more than GPUs; nodes that lost a GPU look like these.
    ///
    /// The list also has GPUs with no usable NIC next to them, or with too few for one each, if most GPUs
    /// have a usable one. It has all GPUs if none has a usable NIC, and ranks would use NICs for storage.
    /// Nodes of which half is cabled are a regular design too.
    pub fn missing_rails(&self) -> Vec<MissingRail<'_>> {
        let shares = self.rail_shares();
        if shares.len() < 2 {
            return Vec::new();
        }
        let mut missing = self.absent_rails(&shares);
        let idle = IdleRails { machine: self, shares: &shares }.find();
        let is_new = |one: &MissingRail<'_>| missing.iter().all(|of| of.gpu.pci != one.gpu.pci);
        let idle: Vec<_> = idle.into_iter().filter(is_new).collect();
        missing.extend(idle);
        missing
    }

    /// Missing NICs, whether links are up or not.
    fn absent_rails<'a>(&'a self, shares: &[RailShare<'a>]) -> Vec<MissingRail<'a>> {
        let best = shares.iter().map(|one| one.distance).min().unwrap_or(Distance::Unknown);
        let with = shares.iter().filter(|one| is_as_near(shares, one)).count();
        match is_next(best) && with < shares.len() {
            true if 2 * with > shares.len() && have_different(shares) => {
                self.without_nic(shares, best, with)
            }
            true => Vec::new(),
            false => self.uneven(shares),
        }
    }

    fn without_nic<'a>(
        &'a self,
        shares: &[RailShare<'a>],
        best: Distance,
        with: usize,
    ) -> Vec<MissingRail<'a>> {
        // A display card belongs to no rank.
        let is_alike = |one: &RailShare<'_>| {
            let mut near = shares.iter().filter(|near| is_next(near.distance));
            near.any(|near| near.gpu.device_id == one.gpu.device_id)
        };
        let far = shares.iter().filter(|one| !is_next(one.distance) && is_alike(one));
        far.map(|one| {
            let place = self.pci_at(one.gpu.pci).and_then(|gpu| shared_bridge(gpu, best));
            let ports = place.map_or(Vec::new(), |(_, place)| self.ports_without_link(place));
            MissingRail {
                gpu: one.gpu,
                lack: Lack::NoNic { with, gpus: shares.len(), place, ports },
                cards: self.idle_cards(|card| is_next(self.distance(one.gpu.pci, card))),
                module: self.rail_module(),
                there: self.rail_names(),
            }
        })
        .collect()
    }

    /// Where a container has only some of the GPUs, other NICs prove nothing.
    fn uneven<'a>(&'a self, shares: &[RailShare<'a>]) -> Vec<MissingRail<'a>> {
        let there = self.rail_names();
        let (nics, gpus) = (there.len(), self.gpus.len());
        let usual = usual(shares);
        let some_have_less = shares.iter().any(|one| one.own < usual);
        // A node whose halves are built alike lacks nothing.
        let is_built_so = !some_have_less && have_different(shares);
        if !is_short(nics, gpus) || is_built_so || shares.len() != gpus {
            return Vec::new();
        }
        let less = shares.iter().filter(|one| one.own < usual || !some_have_less);
        less.map(|one| {
            let by = one.nics.iter().map(|nic| sharers(shares, nic)).max().unwrap_or(1);
            let near = one.nics.iter().map(|nic| nic.name.clone()).collect();
            MissingRail {
                gpu: one.gpu,
                lack: Lack::Uneven {
                    has: (one.own > 0).then_some((one.nics.len(), by)),
                    near,
                    usual,
                    gpus,
                },
                cards: self.idle_cards(|_| true),
                module: self.rail_module(),
                there: there.clone(),
            }
        })
        .collect()
    }

    /// Every GPU has NICs next to it, with equally many usable ports. A port that is not usable is
    /// then left uncabled on all NICs.
    pub fn has_even_links(&self) -> bool {
        let shares = self.rail_shares();
        let links = |one: &RailShare<'_>| {
            let ports = one.nics.iter().flat_map(|nic| &nic.ports);
            ports.filter(|port| port.can_carry()).count()
        };
        let first = shares.first().map_or(0, links);
        let is_even = |one: &RailShare<'_>| is_next(one.distance) && links(one) == first;
        shares.len() > 1 && first > 0 && shares.iter().all(is_even)
    }

    /// There are more rail NICs than GPUs, and one or a few more than would divide evenly: 5 for 4.
    pub fn has_nics_to_spare(&self) -> bool {
        let (nics, gpus) = (self.rail_nics().len(), self.gpus.len());
        gpus > 0 && nics > gpus && !nics.is_multiple_of(gpus) && !is_short(nics, gpus)
    }

    fn rail_module(&self) -> Option<&'static str> {
        Some(match self.rail_nics().first()?.family {
            NicFamily::Mlx5 => "mlx5_ib",
            NicFamily::Efa => "efa",
            NicFamily::Ionic => "ionic_rdma",
            NicFamily::Broadcom => "bnxt_re",
            NicFamily::Intel => "irdma",
            NicFamily::Erdma => "erdma",
            NicFamily::Rxe | NicFamily::Siw | NicFamily::Other => return None,
        })
    }

    fn rail_names(&self) -> Vec<&str> {
        self.rail_nics().iter().map(|nic| nic.name.as_str()).collect()
    }

    /// Network cards of the rails' model that are no RDMA devices and for which `is_near` is true.
    pub fn idle_cards(&self, is_near: impl Fn(PciAddress) -> bool) -> Vec<PciAddress> {
        let rails = self.rail_nics();
        let rails: Vec<_> = rails.iter().filter_map(|nic| self.pci_at(nic.pci.get()?)).collect();
        let is_idle = |card: &&PciFunction| {
            card.class.get().is_some_and(|class| class >> 16 == NETWORK)
                && rails.iter().any(|r| (r.vendor, r.device) == (card.vendor, card.device))
                && self.nics.iter().all(|nic| nic.pci.get() != Some(card.address))
                && is_near(card.address)
        };
        self.pci.iter().filter(is_idle).map(|card| card.address).collect()
    }

    /// Ports below a bridge without a link.
    pub(crate) fn ports_without_link(&self, place: PciAddress) -> Vec<PciAddress> {
        let is_empty = |port: &&PciFunction| {
            port.is_bridge()
                && port.bridges.contains(&place)
                && port.link.width.get().is_none()
                && self.pci.iter().all(|below| !below.bridges.contains(&port.address))
        };
        self.pci.iter().filter(is_empty).map(|port| port.address).collect()
    }
}

/// Whether there are too few NICs to divide evenly, rather than too many: the next larger number
/// that divides evenly is nearer than the next smaller one. Where both are equally near it is not
/// known; an odd number of GPUs, or one NIC for each, is then taken as a sign that no NIC is
/// missing.
fn is_short(nics: usize, gpus: usize) -> bool {
    let divides = |nics: &usize| nics.is_multiple_of(gpus) || gpus.is_multiple_of(*nics);
    let more = (nics..nics + gpus).find(divides);
    let less = (1..=nics).rev().find(divides);
    let (Some(more), Some(less)) = (more, less) else { return false };
    let (lacks, spare) = (more - nics, nics - less);
    lacks < spare || lacks == spare && lacks > 0 && nics < gpus && gpus.is_multiple_of(2)
}

/// Whether GPUs whose NICs are as near as any have different ones. Where all share the same NICs
/// there is nothing to compare.
fn have_different(all: &[RailShare<'_>]) -> bool {
    let mut near = all.iter().filter(|one| is_as_near(all, one));
    let Some(first) = near.next() else { return false };
    let names = || first.nics.iter().map(|nic| &nic.name);
    near.any(|one| one.nics.iter().map(|nic| &nic.name).ne(names()))
}

/// Whether a NIC this near is a GPU's own: both are below one switch, or below one root port.
fn is_next(distance: Distance) -> bool {
    matches!(distance, Distance::SameSwitch | Distance::SameRootPort)
}

/// Whether a GPU's NICs are as near as those of any GPU.
fn is_as_near(all: &[RailShare<'_>], one: &RailShare<'_>) -> bool {
    let best = all.iter().map(|one| one.distance).min();
    Some(one.distance) == best || best.is_some_and(is_next) && is_next(one.distance)
}

/// The number of GPUs that are nearest to a NIC, of those whose NICs are as near as any.
fn sharers(all: &[RailShare<'_>], nic: &Nic) -> usize {
    let is_sharer = |one: &&RailShare<'_>| {
        is_as_near(all, one) && one.nics.iter().any(|own| own.name == nic.name)
    };
    all.iter().filter(is_sharer).count().max(1)
}

/// The number of NICs of one GPU, in thousandths: a NIC that others are as near to counts as a
/// fraction.
fn share(all: &[RailShare<'_>], nics: &[&Nic]) -> u64 {
    nics.iter().map(|nic| 1000 / sharers(all, nic) as u64).sum()
}

/// The share of most GPUs; where no share is that of most, the largest.
fn usual(all: &[RailShare<'_>]) -> u64 {
    let count = |own: u64| all.iter().filter(|one| one.own == own).count();
    let most = all.iter().map(|one| one.own).find(|own| 2 * count(*own) > all.len());
    most.or(all.iter().map(|one| one.own).max()).unwrap_or(0)
}

/// The bridge above both a GPU and a NIC at this distance: the switch, else the root port.
fn shared_bridge(gpu: &PciFunction, best: Distance) -> Option<(&'static str, PciAddress)> {
    // The last one is the switch's own port to the GPU.
    let at = match best {
        Distance::SameSwitch => gpu.bridges.len().saturating_sub(2),
        _ => 0,
    };
    let word = if at > 0 { "switch" } else { "root port" };
    gpu.bridges.get(at).map(|bridge| (word, *bridge))
}

/// `one NIC for each GPU`, of thousandths.
pub fn share_in_words(own: u64) -> String {
    match own {
        ONE_NIC..=1000 => "one NIC for each".to_owned(),
        own if own > 1000 && own.is_multiple_of(1000) => format!("{} NICs for each", own / 1000),
        own if own > 1000 => format!("{:.1} NICs for each", own as f64 / 1000.0),
        own => format!("one NIC for {:.0}", 1000.0 / own.max(1) as f64),
    }
}

impl Display for MissingRail<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let gpu = format!("GPU {} ({})", self.gpu.index, self.gpu.pci);
        let cards = first_names(&self.cards);
        match &self.lack {
            Lack::NoNic { with, gpus, place, ports } => {
                write!(f, "{gpu} has no NIC of its own, and {with} of {gpus} GPUs have one: ")?;
                match place {
                    Some((word, at)) => write!(f, "below its {word} {at} ")?,
                    None => write!(f, "next to it ")?,
                }
                match (self.cards.is_empty(), ports.is_empty()) {
                    (false, _) => write!(f, "is the card {cards}, which has no RDMA device")?,
                    (true, false) => {
                        write!(f, "is no such card, and port {} has no link", first_names(ports))?;
                    }
                    (true, true) => write!(f, "is no such card")?,
                }
            }
            Lack::Uneven { has, near, usual, gpus } => {
                let nics = self.there.len();
                write!(f, "{nics} NICs do not divide evenly among {gpus} GPUs: {gpu} has ")?;
                match has {
                    Some((nics, 1)) => write!(f, "{nics} ({})", first_names(near))?,
                    Some((nics, by)) => write!(f, "{nics} for {by} GPUs ({})", first_names(near))?,
                    None => write!(f, "none as near as others")?,
                }
                write!(f, ", and others {}", share_in_words(*usual))?;
                if !self.cards.is_empty() {
                    write!(f, "; the card {cards} has no RDMA device")?;
                }
            }
            Lack::Idle { with, gpus, nics, left } => {
                match left.is_empty() {
                    true => write!(f, "{gpu} has no NIC next to it that can be used")?,
                    false => write!(
                        f,
                        "{gpu} has no NIC of its own that can be used, and shares {}",
                        first_names(left)
                    )?,
                }
                let others = match with {
                    0 => "nor has any other GPU".to_owned(),
                    with => format!("and {with} of {gpus} GPUs have one"),
                };
                return write!(
                    f,
                    ", {others}: {}; NICs that can be used: {}",
                    first_names(nics),
                    first_names(&self.there)
                );
            }
        }
        write!(f, "; NICs that are there: {}", first_names(&self.there))
    }
}

impl MissingRail<'_> {
    /// The fix, as commands.
    pub fn fix(&self) -> String {
        match (self.cards.first(), &self.lack) {
            (_, Lack::Idle { nics, .. }) => {
                let mut fixes: Vec<&str> = nics.iter().map(|nic| nic.fix.as_str()).collect();
                fixes.dedup();
                fixes.join("; ")
            }
            (Some(card), _) => {
                let load = self.module.map_or(String::new(), |name| format!("modprobe {name}, "));
                format!(
                    "{load}then dmesg; lspci -k -s {card} shows the card's driver; in a container, where the host \
                     has its RDMA device: give that to the container"
                )
            }
            (None, Lack::NoNic { .. }) => {
                "lspci lists no such card there: reseat or replace it, or give the container its device"
                    .to_owned()
            }
            (None, Lack::Uneven { .. }) => {
                "look for the missing card (lspci, dmesg), or give the container its device".to_owned()
            }
        }
    }
}
