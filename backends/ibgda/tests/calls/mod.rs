//! Random calls of the device API, and the requests that they must write. Shared by the tests on the model and by the
//! program that runs on a GPU.

use tokenyard_hca::Random;
use tokenyard_sys_mlx5::wqe::{BLOCK, Control, InlineData, Local, Remote, Request};

/// One call of the device API on a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// 0: put, 1: put of a value, 2: signal, 3: get, 4: put with a signal, 5: signal with the fence bit.
    pub(crate) what: u32,
    /// The queue pair, and the index of its next request.
    pub(crate) qpn: u32,
    pub(crate) index: u16,
    pub(crate) to: Remote,
    pub(crate) from: Local,
    /// The value that is stored or added.
    pub(crate) value: u64,
}

impl Call {
    pub(crate) fn random(random: &mut Random) -> Self {
        let (qpn, index) = (1 + random.below(0x00ff_fffe) as u32, random.bits() as u16);
        let to = Remote { address: random.bits(), key: random.bits() as u32 };
        let bytes = 1 + random.below(1 << 30) as u32;
        let from = Local { address: random.bits(), key: random.bits() as u32, bytes };
        let (what, add) = (random.below(6) as u32, 1 + random.below(65_535));
        let value = if what == 1 { random.bits() } else { add };
        Self { what, qpn, index, to, from, value }
    }

    /// The blocks that the call must write.
    pub(crate) fn blocks(&self) -> Vec<[u8; BLOCK]> {
        let Self { to, from, .. } = *self;
        let sink = Local { bytes: 8, ..from };
        let add = Request::FetchAdd { to, add: self.value, sink };
        let requests = match self.what {
            0 => vec![Request::Write { to, from }],
            1 => {
                let data = InlineData::new(&self.value.to_ne_bytes()).expect("8 bytes");
                vec![Request::WriteInline { to, data }]
            }
            3 => vec![Request::Read { from: to, to: from }],
            4 => vec![Request::Write { to, from }, add],
            _ => vec![add],
        };
        let last = requests.len() - 1;
        let block = |(at, request): (usize, &Request)| {
            let index = self.index.wrapping_add(at as u16);
            let fence = self.what == 5;
            request.to_block(Control { index, qpn: self.qpn, signaled: at == last, fence })
        };
        requests.iter().enumerate().map(block).collect()
    }
}

#[allow(dead_code, reason = "for the model, which reads calls as text")]
impl Call {
    /// The call for `tests/model/golden.cpp`.
    pub(crate) fn line(&self) -> String {
        let Self { what, qpn, index, to, from, value } = *self;
        format!(
            "{what} {qpn:x} {index:x} {:x} {:x} {:x} {:x} {:x} {value:x}\n",
            to.address, to.key, from.address, from.key, from.bytes
        )
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
