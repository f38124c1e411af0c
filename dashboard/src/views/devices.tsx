/** The devices of this node and their load. */

import type { DeviceInfo, Phase } from "../api/schema";
import { bytes, count, NONE, percent } from "../format/format";
import { cleanName } from "../format/sanitize";

export function Devices({ devices, phase }: { devices: DeviceInfo[]; phase: Phase }) {
  if (!devices.length) {
    const rests = phase === "paused" || phase === "stopped" || phase === "error";
    return <p class="plain">{rests ? "No device is in use." : "The devices are not known yet, because the node is starting."}</p>;
  }
  const withoutGpu = devices.every((device) => device.kind === "cpu");
  return (
    <>
      {withoutGpu && <p class="plain">No GPU in use. This node trains on the CPU, which is slower but contributes as well.</p>}
      <ul class="devices">
        {devices.map((device, at) => (
          <li key={at}>
            <h3>
              {cleanName(device.name, 48)} <small>{device.kind}</small>
            </h3>
            <Meter label="Load" share={device.utilization_ratio} text={percent(device.utilization_ratio)} />
            <Meter
              label="Memory"
              share={ratio(device.memory_used_bytes, device.memory_size_bytes)}
              text={device.memory_used_bytes === null ? NONE : `${bytes(device.memory_used_bytes)} of ${bytes(device.memory_size_bytes)}`}
            />
            {device.temperature_celsius !== null && (
              <p class="meter">
                <span>Temperature</span>
                <b>{`${Math.round(device.temperature_celsius)}\u202f°C`}</b>
              </p>
            )}
            {device.power_watts != null && (
              <p class="meter">
                <span>Power</span>
                <b>{`${count(device.power_watts)}\u202fW`}</b>
              </p>
            )}
          </li>
        ))}
      </ul>
    </>
  );
}

function ratio(part: number | null, whole: number | null): number | null {
  return part === null || !whole ? null : part / whole;
}

function Meter({ label, share, text }: { label: string; share: number | null; text: string }) {
  return (
    <p class="meter">
      <span>{label}</span>
      <span class="bar" aria-hidden="true">
        <i style={{ width: `${Math.min(100, (share ?? 0) * 100).toFixed(0)}%` }} />
      </span>
      <b>{text}</b>
    </p>
  );
}
