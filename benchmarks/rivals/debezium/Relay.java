import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.connect.source.SourceRecord;

/** Debezium's engine with its outbox event router; each batch is sent by an idempotent producer and flushed. */
public class Relay {
    public static void main(String[] arguments) {
        Map<String, String> given = System.getenv();
        Properties engine = new Properties();
        engine.put("name", "rival");
        engine.put("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
        engine.put("offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore");
        engine.put("offset.flush.interval.ms", "1000");
        engine.put("database.hostname", given.get("RIVAL_HOST"));
        engine.put("database.port", given.get("RIVAL_PORT"));
        engine.put("database.user", given.get("RIVAL_USER"));
        engine.put("database.password", given.get("RIVAL_PASSWORD"));
        engine.put("database.dbname", given.get("RIVAL_DATABASE"));
        engine.put("topic.prefix", "rival");
        engine.put("plugin.name", "pgoutput");
        engine.put("slot.name", "rival");
        engine.put("publication.name", "rival");
        engine.put("publication.autocreate.mode", "disabled");
        engine.put("snapshot.mode", "no_data");
        engine.put("table.include.list", "public.outbox");
        engine.put("tombstones.on.delete", "false");
        engine.put("max.batch.size", "8192");
        engine.put("max.queue.size", "32768");
        engine.put("poll.interval.ms", "10");
        engine.put("transforms", "outbox");
        engine.put("transforms.outbox.type", "io.debezium.transforms.outbox.EventRouter");
        engine.put("transforms.outbox.route.topic.replacement", "${routedByValue}");

        Properties client = new Properties();
        client.put("bootstrap.servers", given.get("RIVAL_KAFKA"));
        client.put("acks", "all");
        client.put("compression.type", "lz4");
        KafkaProducer<byte[], byte[]> producer =
            new KafkaProducer<>(client, new ByteArraySerializer(), new ByteArraySerializer());

        DebeziumEngine<RecordChangeEvent<SourceRecord>> running =
            DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
                .using(engine)
                .notifying((events, committer) -> {
                    for (RecordChangeEvent<SourceRecord> event : events) {
                        SourceRecord record = event.record();
                        if (record.value() instanceof String payload) {
                            producer.send(new ProducerRecord<>(record.topic(), bytes(record.key()), bytes(payload)));
                        }
                    }
                    producer.flush();
                    for (RecordChangeEvent<SourceRecord> event : events) {
                        committer.markProcessed(event);
                    }
                    committer.markBatchFinished();
                })
                .build();
        running.run();
    }

    private static byte[] bytes(Object text) {
        return text == null ? null : text.toString().getBytes(StandardCharsets.UTF_8);
    }
}
